"""page-table: checks each page table before an attention kernel reads it."""
