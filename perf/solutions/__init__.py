"""Entry points for SOL-ExecBench, a file for each operator: `perf solexecbench` bundles them with what they import."""
