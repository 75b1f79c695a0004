-- title: Supervised tokens that a training window of 2K keeps
-- unit: share
-- limit: 0.20
-- direction: min
-- severity: warning
-- scope: pilot, build
-- advice: Train with a longer window, or generate with a smaller sampling.max_new_tokens. It matters only if you train at 2K.
SELECT sum(greatest(0, least(seq_len, 2048) - prompt_len)) / sum(seq_len - prompt_len) FROM tokens;

-- examples:
SELECT prompt_id, seq_len || ' tokens, ' || prompt_len || ' of them the prompt'
FROM tokens WHERE seq_len > 2048 ORDER BY seq_len DESC, conversation_id LIMIT 3;
