"""The paper's analysis and pictures, as code: run/analysis_xi.sh and run/figures.sh."""
