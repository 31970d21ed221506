"""The kernels in C++, for CPUs: built for a model's sizes when they are first needed."""
