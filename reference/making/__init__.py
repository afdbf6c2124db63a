"""The parts of make.py."""
