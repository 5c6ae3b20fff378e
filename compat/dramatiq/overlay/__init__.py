"""Makes every ``RedisBroker`` that a test module builds one of ours, before the module is imported."""

import dramatiq.brokers.redis

from .shapes import RedisShape

dramatiq.brokers.redis.RedisBroker = RedisShape  # type: ignore[misc,assignment]
