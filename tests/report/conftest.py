"""A browser for the tests that click through the report."""

from browsers import browser as browser
