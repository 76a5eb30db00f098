"""Operations on sharded tensors, each written once for all layouts."""
