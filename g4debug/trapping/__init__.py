"""What happens with a finding: it is described, dumped, logged, and in raise mode raised."""
