"""What works with this release and what does not: one table, from which docs/compatibility.md is written."""
