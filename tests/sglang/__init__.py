"""The backend against SGLang itself. Run by ``make test-sglang``; without SGLang on the path there is nothing here."""
