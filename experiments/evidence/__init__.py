"""Predictions beside measurements, executed here or published: numbers only, no terminal and no pages."""
