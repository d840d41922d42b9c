# g4debug on top of SGLang's own image. Nothing of SGLang is changed in it.
#   docker build -t sglang-g4debug .
#   docker build -t sglang-g4debug --build-arg SGLANG_IMAGE=lmsysorg/sglang:v0.5.15.post1 .
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23
FROM ${SGLANG_IMAGE}
COPY . /opt/g4debug
# The image has all that g4debug depends on, so pip installs nothing else and changes no version.
# What pip check says of other packages does not count, so its exit code does not, either.
# hadolint ignore=DL4006
RUN python3 -m pip install --no-cache-dir --no-deps /opt/g4debug \
    && python3 -m pip check --disable-pip-version-check 2>&1 | (! grep -i "^g4debug ") \
    && rm -rf /opt/g4debug \
    && g4debug --version
