"""Entry points for SOL-ExecBench, one file for each operator: `perf solexecbench` bundles them with what they import."""
