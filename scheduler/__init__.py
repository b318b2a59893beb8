"""The verifier side: SGLang scheduler, worker and the client of the draft server."""
