"""Evaluation of models on problems with known answers: samples, their scores, and statistics over them."""
