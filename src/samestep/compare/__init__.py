"""One recipe on many engines and regimes: run one after the other, compared bit by bit."""
