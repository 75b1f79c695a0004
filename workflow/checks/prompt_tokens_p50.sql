-- title: Length of a prompt: median
-- unit: tokens
-- scope: pilot, build
SELECT quantile_cont(prompt_tokens, 0.50) FROM completions WHERE status = 'ok';
