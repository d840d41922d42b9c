"""``g4debug cpu-server --help``: the toys and the drafts, each with what it is."""

import re

import pytest

from g4debug import cli, discovery


@pytest.mark.parametrize("noun", ["toy", "draft"])
def test_each_name_stands_apart_from_what_it_is(noun, capsys):
    with pytest.raises(SystemExit):
        cli.main(["cpu-server", "--help"])
    listed = dict(re.findall(r"^  ([a-z0-9-]+)  +(\S.*)$", capsys.readouterr().out, re.MULTILINE))
    for name in discovery.names(noun):
        assert listed[name].startswith(discovery.load(noun, name).about)
