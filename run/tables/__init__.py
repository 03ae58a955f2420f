"""The paper's tables: its numbers as data, and the experiments behind them."""
