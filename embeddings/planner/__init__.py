"""What choosing a plan or a schedule rests on: a simulator of operations on resources."""
