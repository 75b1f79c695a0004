-- title: Prompts that failed for the most frequent reason
-- unit: share
-- limit: 0.015
-- severity: warning
-- advice: One reason behind most failures usually has one cause: look at the examples' prompts.
SELECT max(failures) / (SELECT count(*) FROM completions)
FROM (SELECT count(*) AS failures FROM completions WHERE status = 'failed' GROUP BY reason);

-- examples:
SELECT min(prompt_id), reason || ': ' || count(*) || ' prompts'
FROM completions WHERE status = 'failed' GROUP BY reason ORDER BY count(*) DESC, reason LIMIT 3;
