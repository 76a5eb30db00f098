"""What a rank needs memory for, in closed form: values from the configuration alone, held against measurement."""
