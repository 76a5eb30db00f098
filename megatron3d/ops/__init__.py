"""Operations on shards, each written once for every layout."""
