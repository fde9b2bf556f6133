"""Tables, pictures and pages of results. Measures nothing, and imports neither torch nor a plotting library at once."""
