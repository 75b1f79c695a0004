-- title: Training rows that don't end as they should: in a supervised stop token exactly when the model stopped by itself
-- unit: rows
-- limit: 0
-- advice: A drafter learns from these rows when to stop. Compare model.stop_ids in build.json with the model's generation
--   config; discard the shards that the examples are in.
SELECT count(*) FILTER (
    (finish_reason = 'stop') IS DISTINCT FROM list_contains(stop_ids, last_id) OR last_mask <> 1)
FROM training_rows, settings WHERE stop_ids IS NOT NULL;

-- examples:
SELECT prompt_id, 'finish_reason ' || finish_reason || ', last id ' || last_id || ', mask ' || last_mask
FROM training_rows, settings
WHERE stop_ids IS NOT NULL
    AND ((finish_reason = 'stop') IS DISTINCT FROM list_contains(stop_ids, last_id) OR last_mask <> 1)
ORDER BY conversation_id LIMIT 3;
