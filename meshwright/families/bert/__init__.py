"""BERT (Devlin et al., 2018), and the tasks that it is fine-tuned for: pairs of sentences, SQuAD, RACE."""
