-- title: Length of an answer: 5% are longer
-- unit: tokens
-- scope: pilot, build
SELECT quantile_cont(completion_tokens, 0.95) FROM completions WHERE status = 'ok';
