"""Context parallelism: sequences cut over ranks, inside attention as well."""
