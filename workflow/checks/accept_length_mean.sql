-- title: Accept length of speculative decoding, mean
-- unit: tokens a step
-- limit: 1.5
-- direction: min
-- reused: apart
-- advice: Near 1 the servers draft in vain: slow, and a sign of broken output. See `shardmill servers status` for each server,
--   restart the bad one, and discard the shards that it wrote. Servers that draft nothing give no value.
SELECT sum(accept_length * completion_tokens) / sum(completion_tokens)
FROM completions WHERE status = 'ok' AND accept_length IS NOT NULL;

-- examples:
SELECT prompt_id, server || ': accept length ' || round(accept_length, 2) || ' over ' || completion_tokens || ' tokens'
FROM completions WHERE accept_length IS NOT NULL AND completion_tokens > 64 ORDER BY accept_length LIMIT 3;
