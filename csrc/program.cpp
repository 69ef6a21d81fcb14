// Placeholder until the step runner arrives.
