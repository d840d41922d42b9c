"""What a finding is and what a dump holds, and the last steps, in host memory."""
