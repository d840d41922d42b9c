"""page-table: every live cell is the page that req_to_token and the allocators say."""
