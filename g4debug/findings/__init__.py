"""The classes of findings and of a dump's content, and the recorder of the last steps."""
