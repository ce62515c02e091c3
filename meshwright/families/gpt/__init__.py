"""GPT-2, which runs train where they name no family."""
