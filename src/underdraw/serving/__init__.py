"""The server: OpenAI's images API, and a page that shows a picture while it is drawn."""
