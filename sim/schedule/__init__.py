"""The score: schedules as data, and the builders that write them. Knows neither simulator, hardware nor machine."""
