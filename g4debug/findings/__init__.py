"""What a finding is, what a dump holds, and the recorder of the last steps."""
