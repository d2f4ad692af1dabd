"""Fakes that penstock's own tests use, shipped so that yours can too: docs/how-to/testing.md."""
