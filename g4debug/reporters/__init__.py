"""How a record or a table is shown: one file for each form. The command passes the stream."""
