-- title: Answers that go on after a stop token
-- unit: rows
-- limit: 0
-- advice: The server gave ids after the stop token, as some versions do under speculative decoding. Discard these shards and
--   update the server.
SELECT count(*) FILTER (first_stop < output_ids_len) FROM answers;

-- examples:
SELECT prompt_id, server || ': stop token at ' || first_stop || ' of ' || output_ids_len
FROM answers WHERE first_stop < output_ids_len ORDER BY conversation_id LIMIT 3;
