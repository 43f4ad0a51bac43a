-- wrk's script: posts one body with one key again and again, and prints the figures as one line of JSON.
wrk.method = "POST"
wrk.body = os.getenv("BENCH_BODY")
wrk.headers["content-type"] = "application/json"
wrk.headers["authorization"] = "Bearer " .. os.getenv("BENCH_KEY")

done = function(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '\nfigures {"requests": %d, "seconds": %.6f, "p50_ms": %.3f, "p90_ms": %.3f, "p99_ms": %.3f, "max_ms": %.3f, ' ..
    '"non_2xx": %d, "broken": %d, "timeouts": %d}\n',
    summary.requests, summary.duration / 1e6,
    latency:percentile(50) / 1e3, latency:percentile(90) / 1e3, latency:percentile(99) / 1e3, latency.max / 1e3,
    errors.status, errors.connect + errors.read + errors.write, errors.timeout
  ))
end
