"""swa-allocator: each page has one holder, and each full page one SWA page."""
