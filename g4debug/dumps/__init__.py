"""Writes dumps, checks them before they are opened, and reads them. Imports no sglang."""
