"""What all commands share: options, console, inputs, completion, interrupts."""
