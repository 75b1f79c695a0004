-- title: Length of an answer: median
-- unit: tokens
-- limit: 64
-- direction: min
-- severity: warning
-- advice: Short answers train little. Look at nearly_empty, no_thinking and truncated first.
-- scope: pilot, build
SELECT quantile_cont(completion_tokens, 0.50) FROM completions WHERE status = 'ok';
