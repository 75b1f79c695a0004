-- title: Length of an answer: 5% are shorter
-- unit: tokens
-- scope: pilot, build
SELECT quantile_cont(completion_tokens, 0.05) FROM completions WHERE status = 'ok';
