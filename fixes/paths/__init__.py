"""The performance paths: faster ways through SGLang's Gemma-4, one file or folder each."""
