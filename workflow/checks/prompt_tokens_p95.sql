-- title: Length of a prompt: 5% are longer
-- unit: tokens
-- scope: pilot, build
SELECT quantile_cont(prompt_tokens, 0.95) FROM completions WHERE status = 'ok';
