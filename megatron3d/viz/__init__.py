"""Pictures and the HTML report of a run, and the pictures of the documentation."""
