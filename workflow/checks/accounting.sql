-- title: Records and prompts that are not accounted for
-- unit: rows
-- limit: 0
-- scope: build
-- advice: Every record must become a conversation or be named, and every prompt be answered, failed or not reached. A
--   shard's file is missing or was changed: `shardmill verify` says which.
SELECT unaccounted FROM accounting;

-- examples:
SELECT shard, prompts || ' prompts, ' || answered || ' rows, ' || not_reached || ' not reached'
FROM shard_accounting WHERE prompts <> answered + not_reached ORDER BY shard LIMIT 3;
