"""From a plan to text: Jinja2 templates, and the words that go into them."""
