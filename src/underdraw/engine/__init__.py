"""The engine: target sessions and the decoding loop."""
