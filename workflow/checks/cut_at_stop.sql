-- title: Answers that went on after their stop token, and were cut there
-- unit: share
-- limit: 0.05
-- severity: warning
-- advice: The rows are right: what came after the first stop token was taken away before they were kept. Some versions of
--   SGLang answer so near max_new_tokens under speculative decoding (mended in August 2026, PR 33758): update the servers.
SELECT sum(cut_at_stop) / (SELECT nullif(count(*), 0) FROM completions WHERE status = 'ok' AND reused_from IS NULL)
FROM shard_effort;

-- examples:
SELECT NULL, shard || ': ' || cut_at_stop || ' answers'
FROM shard_effort WHERE cut_at_stop > 0 ORDER BY cut_at_stop DESC, shard LIMIT 3;
