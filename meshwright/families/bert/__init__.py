"""BERT (Devlin et al., 2018), and its fine-tuning on pairs of sentences, SQuAD and RACE."""
