"""LSTM, GRU and RNN, also quantised."""
